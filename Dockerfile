# The recipe with its CUDA wheels, on plain Python: the host brings the NVIDIA driver and its container toolkit.
#
#   docker build --tag recsys .
#   docker run --gpus all --ipc host --volume DIR:/data --volume "$PWD/runs:/recsys/runs" recsys \
#       torchrun --nproc-per-node gpu dlrm.py experiment=dlrm_criteo_t15 data.path=/data
#
# `runs` must be writable for user 1000, which is who trains in there.
FROM python:3.12-slim

# A compiler, since torch.compile and Triton build their launchers on the spot; numactl, by which torchrun binds ranks.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ numactl \
    && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir uv \
    && useradd --create-home --uid 1000 trainer \
    && install --directory --owner trainer /recsys /recsys/runs

USER trainer
WORKDIR /recsys

# The wheels in a layer of their own: a change of code does not fetch them again.
COPY --chown=trainer pyproject.toml ./
RUN uv sync --extra cuda --no-dev --no-install-project --no-cache
ENV PATH="/recsys/.venv/bin:$PATH"

COPY --chown=trainer configs configs
COPY --chown=trainer dataloading dataloading
COPY --chown=trainer preproc preproc
COPY --chown=trainer nn nn
COPY --chown=trainer benchmarks benchmarks
COPY --chown=trainer main.py dlrm.py dcnv2.py README.md ./

CMD ["python", "dlrm.py", "--help"]
