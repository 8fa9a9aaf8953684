"""Silence for what the libraries say on every start and no user can act on; their errors still come through."""

import logging
import warnings

# Loggers that warn about their own internals: FX tracing inside TorchRec, cache settings of tables without a cache.
CHATTY_LOGGERS = ("torch.fx._symbolic_trace", "torchrec.distributed.utils")

# Starts of messages: FBGEMM's import of kernels that its wheels leave out and of B200 tuning on other GPUs, its dense
# lookup's registration (its gradients are tested here), and names that TorchRec and FBGEMM still use.
CHATTY_WARNINGS = (
    r"\s*Failed to import: fbgemm_gpu",
    r"\s*The Python module fbgemm_gpu",
    r"TBE B200 optimization",
    r"fbgemm::dense_embedding_codegen_lookup_function",
    r"`_get_pg_default_device`",
    r"`torch.jit",
)


def quiet_libraries() -> None:
    """Call before importing TorchRec."""
    for name in CHATTY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for start in CHATTY_WARNINGS:
        warnings.filterwarnings("ignore", message=start)
    logging.getLogger().addFilter(_is_not_about_versions)


def _is_not_about_versions(record: logging.LogRecord) -> bool:
    # FBGEMM's own table of versions ends before its releases do; `nn.stack` checks the pair.
    return "_fbgemm_torch_compat_table" not in str(record.msg)
