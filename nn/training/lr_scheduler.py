"""The learning rate schedule, as a factor on the peak rates of tables and dense component."""

import math

from configs.schema import SchedulerConfig


def learning_rate_factor(step: int, config: SchedulerConfig) -> float:
    """Return the factor on the peak learning rates in update `step`.

    With s = step + `first_step`, W = `warmup_steps`, D = `decay_start_step`, N = `decay_steps`: s / W up to W, then 1 up to D,
    then ((D + N - s) / N)^power, and 0 from D + N on. This is the schedule of NVIDIA's DLRM for PyTorch
    (DeepLearningExamples, `LearningRateScheduler`), whose counter starts at 1. Their TensorFlow 2 recipe starts at 0,
    so that its first update does nothing, and follows the parabola up again after D + N.

    The cosine decay is (1 + cos(pi * (s - D) / N)) / 2 instead (Loshchilov and Hutter, SGDR, 2017, equation 5, without restarts).

    `step` updates were made before this one. Without `decay_start_step` the rate is held forever.
    """
    count = step + config.first_step
    if count < config.warmup_steps:
        return count / config.warmup_steps
    if config.decay_start_step is None or count <= config.decay_start_step:
        return 1.0
    left = max(config.decay_start_step + config.decay_steps - count, 0) / config.decay_steps
    cosine = (1 - math.cos(math.pi * left)) / 2
    return {"cosine": cosine, "polynomial": left**config.decay_power}[config.decay]


def has_ended(step: int, config: SchedulerConfig) -> bool:
    """Return whether a training that continues after `step` updates would have a rate of 0."""
    return step > 0 and learning_rate_factor(step, config) == 0
