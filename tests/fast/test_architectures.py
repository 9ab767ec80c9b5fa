"""csrc/*.cu compiled for each architecture that we name, without a GPU: by every compiler that is here, and never none.

That NVRTC takes the sources through cupy, and what they do, needs a GPU: `test_cuda_backend.py`. What they compute is
`test_kernels_on_host.py`.
"""

from __future__ import annotations

import itertools

import pytest
from device_compilers import CompileError, compilers

from lmcache_fast.cuda import compile as cuda_compile
from lmcache_fast.cuda.compile import OPTIONS, SOURCES, source_text

WIDTHS = (16, 8, 4, 2, 1)
TYPES = ("bfloat16", "float16", "float32", "float64")
KERNELS = {
    "transfer.cu": {f"{operation}_{width}" for operation in ("gather", "scatter") for width in WIDTHS},
    "keep.cu": {f"keep_{width}" for width in WIDTHS},
    "rotate.cu": {
        f"{operation}_{key}_{table}"
        for operation, key, table in itertools.product(("rotate", "scatter_rotated"), TYPES, TYPES)
    },
}
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
#: in CI this reason is not allowed: the extra `test` brings NVRTC
NONE = pytest.param(None, id="none", marks=pytest.mark.skip(reason="neither nvcc nor NVRTC is here"))
every_compiler = pytest.mark.parametrize("compiler", compilers() or [NONE], ids=str)


def test_every_source_is_here():
    assert set(KERNELS) == set(SOURCES)
    assert [len(KERNELS[source]) for source in SOURCES] == [10, 5, 32]


@every_compiler
@pytest.mark.parametrize("source", KERNELS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernels_compile(architecture, source, compiler):
    """Without warnings, and without spills: a kernel that keeps its addresses in memory is not the one that was measured."""
    if not compiler.supports(architecture):  # not in .ci/skips.txt: in CI every compiler knows every architecture
        pytest.skip(f"{compiler} is too old for {architecture}")
    compiled = compiler.compile(source, source_text(source), architecture, OPTIONS)
    assert compiled.kernels == KERNELS[source]
    assert "warning" not in compiled.log, compiled.log
    entries = compiled.log.count("Compiling entry function")
    assert entries == len(KERNELS[source])
    assert compiled.log.count("0 bytes spill stores, 0 bytes spill loads") == entries, compiled.log


@pytest.mark.parametrize("source", KERNELS)
def test_each_kernel_is_looked_for_where_it_is(source):
    for name in KERNELS[source]:
        assert SOURCES[cuda_compile._source_of(name)] == source


# ------------------------------------------------------------------------------------------------ the checks themselves

#: 96 numbers at once, of which 32 registers a thread hold a third
SPILLS = """extern "C" __global__ void __launch_bounds__(1024, 2) spills(const float* x, float* y) {
    float held[96];
#pragma unroll
    for (int i = 0; i < 96; ++i) held[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 96; ++i) y[(95 - i) * 1024 + threadIdx.x] = held[i] * held[(i * 7) % 96];
}"""
WARNS = 'extern "C" __global__ void warns(int* x) { int unused = 1; *x = 2; }'


@every_compiler
@pytest.mark.parametrize("source", SOURCES)
def test_an_error_in_the_source_is_an_error_with_the_log(source, compiler):
    text = source_text(source) + "\nint broken = ;\n"
    with pytest.raises(
        CompileError, match=rf"(?s){source} for sm_90 by .*{source}\(\d+\): error: expected an expression"
    ):
        compiler.compile(source, text, "sm_90", OPTIONS)


@every_compiler
def test_a_spill_is_an_error(compiler):
    with pytest.raises(CompileError, match="spill"):
        compiler.compile("spills.cu", SPILLS, "sm_90", OPTIONS)
    roomy = SPILLS.replace("(1024, 2)", "(256)")
    assert compiler.compile("spills.cu", roomy, "sm_90", OPTIONS).kernels == {"spills"}


@every_compiler
def test_a_warning_is_seen(compiler):
    try:
        assert "warning" in compiler.compile("warns.cu", WARNS, "sm_90", OPTIONS).log
    except CompileError as error:
        assert "unused" in str(error)  # nvcc takes it for an error


@every_compiler
def test_an_architecture_that_a_compiler_does_not_know(compiler):
    assert compiler.supports("sm_90") and not compiler.supports("sm_12345")
