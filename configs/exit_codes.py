"""Exit codes of all commands: `dlrm.py`, `dcnv2.py`, `python -m preproc`, `python -m nn.export` and the node launcher."""

# Another rank has ended. Python ends with 1 after an error of the program too, and `mode=verify` where a dataset is wrong.
LOST_RANK_EXIT_CODE = 1
USER_ERROR_EXIT_CODE = 2
DIVERGED_EXIT_CODE = 3
# EX_TEMPFAIL of sysexits.h: the same command resumes. Batch scripts requeue on it.
RESUME_EXIT_CODE = 75
# A step lasted longer than its bound, or a GPU failed. The same command resumes from the latest checkpoint.
FAULT_EXIT_CODE = 76
# 128 + SIGINT, as shells report it.
INTERRUPTED_EXIT_CODE = 130
# A rank that is restarted, or a job that is requeued, would exit with the same code again.
FINAL_EXIT_CODES = (USER_ERROR_EXIT_CODE, DIVERGED_EXIT_CODE, INTERRUPTED_EXIT_CODE)
