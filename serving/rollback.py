"""Command `python -m serving.rollback`: withdraw versions: the newest, so that the one before it serves again, or the oldest."""

from pathlib import Path

from configs.command_line import command
from configs.messages import on_one_line
from configs.serving_schema import RollbackConfig
from serving.versions import withdraw, withdraw_before


def run(config: RollbackConfig) -> None:
    assert config.model is not None, "checked by the options"
    directory = Path(config.model)
    if config.before is not None:
        withdrawn, newest = withdraw_before(directory, config.before)
    else:
        withdrawn, newest = withdraw(directory, config.version)
    print(
        on_one_line(
            f"withdrawn: {', '.join(withdrawn)}; version {newest} serves as soon as the server looks"
        )
    )


if __name__ == "__main__":
    command(run, RollbackConfig, "serving_rollback", ("model",))
