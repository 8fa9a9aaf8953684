# The recipe with its CUDA wheels, on plain Python: the host brings the NVIDIA driver and its container toolkit.
#
#   docker build --tag recsys .
#   docker run --gpus all --ipc host --volume DIR:/data --volume "$PWD/runs:/recsys/runs" recsys \
#       torchrun --nproc-per-node gpu dlrm.py experiment=dlrm_criteo_t15 data.path=/data
#
# `runs` must be writable for user 1000, the user of the container.
# The digest is that of docker-library/repo-info of 2026-08-05; tag and digest are renewed together.
FROM python:3.12.13-slim-trixie@sha256:229a2c5bfa27522db7815ea81f9bed70af17ccb9de9fc7ad142b1877b5830d36

# torch.compile and Triton need a compiler at run time; torchrun binds ranks to CPUs with numactl.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ numactl \
    && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir uv \
    && useradd --create-home --uid 1000 trainer \
    && install --directory --owner trainer /recsys /recsys/runs

USER trainer
WORKDIR /recsys

# The wheels are a separate layer, so that a change of code does not download them again.
COPY --chown=trainer pyproject.toml ./
RUN uv sync --extra cuda --no-dev --extra sweep --no-install-project --no-cache
ENV PATH="/recsys/.venv/bin:$PATH"

COPY --chown=trainer configs configs
COPY --chown=trainer dataloading dataloading
COPY --chown=trainer preproc preproc
COPY --chown=trainer nn nn
COPY --chown=trainer compare compare
COPY --chown=trainer hybrid_parallel_recsys hybrid_parallel_recsys
COPY --chown=trainer status status
COPY --chown=trainer sweep sweep
COPY --chown=trainer serving serving
COPY --chown=trainer benchmarks benchmarks
COPY --chown=trainer main.py dlrm.py dcnv2.py README.md ./

CMD ["python", "dlrm.py", "--help"]
