"""Filters for warnings that libraries print at every start and no user can act on; errors are not filtered."""

import logging
import warnings

# Loggers that warn about their own internals: FX tracing inside TorchRec, cache settings of tables without a cache, its
# process groups.
CHATTY_LOGGERS = (
    "torch.fx._symbolic_trace",
    "torchrec.distributed.utils",
    "torchrec.distributed.comm",
)

# FBGEMM on kernels that its wheels leave out, on Adam's (slower, not wrong), on B200 tuning of other GPUs and on the
# registration of its dense lookup (whose gradients are tested here); names that TorchRec and FBGEMM still use.
CHATTY_WARNINGS = (
    r"Failed to import: fbgemm_gpu",
    r"The Python module fbgemm_gpu",
    r"\[FBGEMM_GPU\] NOTE: The training optimizer",
    r"TBE B200 optimization",
    r"fbgemm::dense_embedding_codegen_lookup_function",
    r"`_get_pg_default_device`",
    r"`broadcast_buffers` is deprecated",
    r"Please use DTensor instead and we are deprecating ShardedTensor",
    r"Multiple backends are registered with this ProcessGroup",
    r"`torch.jit",
    r"`torch\.distributed\.\w+` is deprecated",
)


def quiet_libraries() -> None:
    """Install the filters; call it before TorchRec is imported."""
    for name in CHATTY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for text in CHATTY_WARNINGS:
        # FBGEMM colours its warnings, so the text does not begin with its first word.
        warnings.filterwarnings("ignore", message=rf"[\s\S]*{text}")
    # FBGEMM's own table of versions ends before its releases do; `nn.versions` checks the pair.
    versions = "_fbgemm_torch_compat_table"
    logging.getLogger().addFilter(lambda record: versions not in str(record.msg))
