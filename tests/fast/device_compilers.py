"""The compilers of csrc/*.cu that are here: nvcc, and NVRTC without cupy. Neither needs a GPU or a driver.

What they have to make of the sources is the business of `test_architectures.py`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ELF_MACHINE_CUDA = 190
#: of ptxas: registers and spills of each kernel go to the log, a spill is an error
PTXAS = ("-v", "-Werror", "-warn-spills")


class CompileError(Exception):
    """The sources are not accepted; the text is the compiler's."""


@dataclass(frozen=True)
class Compiled:
    """kernels: names of those in the machine code. log: what the compiler said."""

    kernels: frozenset[str]
    log: str


@dataclass(frozen=True)
class Nvcc:
    path: str

    def __str__(self) -> str:
        return "nvcc"

    def supports(self, architecture: str) -> bool:
        listed = subprocess.run([self.path, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
        return architecture.replace("sm_", "compute_") in listed.split()

    def compile(self, name: str, text: str, architecture: str, options: Sequence[str]) -> Compiled:
        """Machine code of `text`, called `name`, for an architecture such as sm_90. Raises CompileError."""
        ptxas = [word for option in PTXAS for word in ("-Xptxas", option)]
        with tempfile.TemporaryDirectory() as folder:
            source, cubin = Path(folder, name), Path(folder, "kernels.cubin")
            source.write_text(text)
            command = [self.path, f"-arch={architecture}", "--cubin", "-Werror=all-warnings", *options, *ptxas]
            done = subprocess.run([*command, str(source), "-o", str(cubin)], capture_output=True, text=True)
            if done.returncode != 0:
                raise CompileError(f"{name} for {architecture} by {self}:\n{done.stdout}{done.stderr}")
            return Compiled(_kernels(cubin.read_bytes()), done.stdout + done.stderr)


@dataclass(frozen=True)
class Nvrtc:
    path: Path

    def __str__(self) -> str:
        return "NVRTC " + self.path.name.split(".so.")[1].split(".")[0]

    @property
    def library(self) -> ctypes.CDLL:
        for builtins in self.path.parent.glob("libnvrtc-builtins.so.*"):  # asked for later, by its name alone
            ctypes.CDLL(str(builtins))
        return ctypes.CDLL(str(self.path))

    def supports(self, architecture: str) -> bool:
        library, count = self.library, ctypes.c_int()
        assert library.nvrtcGetNumSupportedArchs(ctypes.byref(count)) == 0
        numbers = (ctypes.c_int * count.value)()
        assert library.nvrtcGetSupportedArchs(numbers) == 0
        return int(architecture.removeprefix("sm_")) in numbers

    def compile(self, name: str, text: str, architecture: str, options: Sequence[str]) -> Compiled:
        """As `Nvcc.compile`; warnings are in the log."""
        library, program = self.library, ctypes.c_void_p()
        words = [*options, f"--gpu-architecture={architecture}", *(f"--ptxas-options={option}" for option in PTXAS)]
        array = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
        arguments = (ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
        assert library.nvrtcCreateProgram(*arguments) == 0
        try:
            status = library.nvrtcCompileProgram(program, len(words), array)
            log = _bytes(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)[:-1].decode()
            if status != 0:
                raise CompileError(f"{name} for {architecture} by {self}: status {status}\n{log}")
            return Compiled(_kernels(_bytes(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)), log)
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))


def compilers() -> list[Nvcc | Nvrtc]:
    """nvcc, and the first NVRTC of each major version: of the wheels, of the toolkit, of where the loader looks."""
    nvcc = shutil.which("nvcc")
    found = {str(nvrtc): nvrtc for nvrtc in map(Nvrtc, reversed(list(_libraries())))}
    return [*([Nvcc(nvcc)] if nvcc else []), *sorted(found.values(), key=str)]


def _libraries() -> Iterator[Path]:
    """libnvrtc.so.MAJOR in all the places where one may be, those that count first."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        yield from sorted(Path(folder).glob("*/lib/libnvrtc.so.*"))
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    for folder in [Path(toolkit, "lib64") for toolkit in toolkits if toolkit]:
        yield from sorted(folder.glob("libnvrtc.so.*"))
    for folder in filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)):
        yield from sorted(Path(folder).glob("libnvrtc.so.*"))


def _bytes(size_of, fill, program: ctypes.c_void_p) -> bytes:
    """What a pair of NVRTC's functions, one for the size and one for the bytes, gives out."""
    size = ctypes.c_size_t()
    assert size_of(program, ctypes.byref(size)) == 0
    buffer = ctypes.create_string_buffer(size.value)
    assert fill(program, buffer) == 0
    return buffer.raw


def _kernels(cubin: bytes) -> frozenset[str]:
    """Names of the kernels in machine code: an ELF file for CUDA, with a section for each."""
    assert cubin[:4] == b"\x7fELF" and struct.unpack_from("<H", cubin, 18) == (ELF_MACHINE_CUDA,)
    return frozenset(name.decode() for name in re.findall(rb"\.text\.(\w+)\0", cubin))
