"""Drives CMake with Ninja; what is built, and how, is described in CMakeLists.txt alone.

DSPARK_CUDA=auto|on|off chooses the CUDA kernels, CMAKE_ARGS passes anything else.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCE = Path(__file__).parent.resolve()


class CMakeBuild(build_ext):
    """Builds the one extension by configuring and building CMakeLists.txt."""

    def run(self) -> None:
        super().run()
        # Also beside the sources, as an editable install does: Python prefers the package in the
        # current folder, so `python -m dspark_ext` in a checkout would not find the installed one.
        if not self.inplace:
            self.copy_extensions_to_source()

    def build_extension(self, ext: Extension) -> None:
        module = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = Path(self.build_temp).resolve() / "cmake"
        subprocess.run(
            [
                # Fresh, since an earlier build's cache names tools of an environment that is gone.
                *("cmake", "--fresh"),
                *("-S", str(SOURCE), "-B", str(build), "-G", "Ninja"),
                "-DCMAKE_BUILD_TYPE=Release",
                f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={module.parent}",
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-DDSPARK_CUDA={os.environ.get('DSPARK_CUDA', 'auto')}",
                *shlex.split(os.environ.get("CMAKE_ARGS", "")),
            ],
            check=True,
        )
        jobs = ["-j", str(self.parallel)] if self.parallel else []
        subprocess.run(["cmake", "--build", str(build), *jobs], check=True)
        if not module.exists():
            raise RuntimeError(f"CMake succeeded but did not produce {module}")


setup(
    ext_modules=[Extension("dspark_ext._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
