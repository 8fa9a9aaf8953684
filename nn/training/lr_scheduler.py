"""The learning rate schedule, as a factor on the peak rates of tables and dense component."""

from configs.schema import SchedulerConfig


def learning_rate_factor(step: int, config: SchedulerConfig) -> float:
    """Return the factor on the peak learning rates in update `step`.

    With s = step + 1, W = `warmup_steps`, D = `decay_start_step`, N = `decay_steps`: s / W up to W, then 1 up to D,
    then ((D + N - s) / N)^power, and 0 from D + N on. This is the schedule of NVIDIA's DLRM for PyTorch
    (DeepLearningExamples, `LearningRateScheduler`), whose counter starts at 1. Their TensorFlow 2 recipe starts at 0,
    so that its first update does nothing, and follows the parabola up again after D + N.

    Args:
        step: updates made before this one; 0 for the first.
        config: lengths of the phases; without `decay_start_step` the rate is held forever.
    """
    count = step + 1
    if count <= config.warmup_steps:
        return count / config.warmup_steps
    if config.decay_start_step is None or count <= config.decay_start_step:
        return 1.0
    left = config.decay_start_step + config.decay_steps - count
    return (max(left, 0) / config.decay_steps) ** config.decay_power
