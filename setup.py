"""Layout of the wheel: all packages and commands below one name, beside which an environment has nothing of ours."""

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

NAME = "hybrid_parallel_recsys"
PACKAGES = ("configs", "dataloading", "preproc", "nn", "compare", "serving", "status", "sweep")
COMMANDS = ("main.py", "dlrm.py", "dcnv2.py")


class BuildWithCommands(build_py):
    """Build that copies the commands, which no package holds in a checkout."""

    def run(self) -> None:
        """Build; an editable install finds them in the checkout."""
        super().run()
        if not self.editable_mode:
            for command in COMMANDS:
                self.copy_file(command, f"{self.build_lib}/{NAME}/{command}")


inside = [name for name in find_packages() if name.partition(".")[0] in PACKAGES]
setup(
    packages=[NAME, *(f"{NAME}.{name}" for name in inside)],
    package_dir={f"{NAME}.{name}": name for name in PACKAGES},
    cmdclass={"build_py": BuildWithCommands},
)
