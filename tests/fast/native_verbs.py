"""How csrc/steps.cpp speaks to a device that is written in Python. No test lives here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from lmcache_fast.cuda.device import Arguments
from lmcache_fast.descriptors import Batch, Homes, Rotation


class SpeaksToCompiledSteps:
    """What a device has beside its verbs, so that the compiled steps can use them. It keeps `events`, by handle."""

    def function(self, kernel: str) -> int:
        kernels = self.__dict__.setdefault("kernels", [""])  # no kernel is number 0
        if kernel not in kernels:
            kernels.append(kernel)
        return kernels.index(kernel)

    def native(self, library: ctypes.CDLL) -> tuple[Callable[[int, int], int], int]:
        self.verbs = self.__dict__.get("verbs") or NativeVerbs(self)
        return library.lmcache_fast_steps, self.verbs.address

    def raise_native(self, status: int) -> None:
        errors, self.verbs.errors = self.verbs.errors, []
        raise errors[0]


class NativeVerbs:
    """The verbs of a device of tests as csrc/steps.cpp calls them. errors: what they have raised, for `raise_native`."""

    def __init__(self, device: Any):
        self._device, self.errors = device, []
        events = device.events
        self._functions = [
            self._function(3, device.write),
            self._function(4, device.copy),
            self._function(8, lambda *arguments: device.copy_rows(*arguments[:-1])),  # not: which side is the host
            self._function(4, self._launch),
            self._function(2, lambda event, stream: device.record_again(events[event], stream)),
            self._function(2, lambda stream, event: device.wait(stream, events[event])),
        ]
        mapped = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)(
            lambda _, address: device.mapped(address) or 0
        )
        self._functions.append(mapped)
        self._table = (ctypes.c_void_p * 8)(
            None, *(ctypes.cast(function, ctypes.c_void_p).value for function in self._functions)
        )
        self.address = ctypes.addressof(self._table)

    def _function(self, count: int, verb: Callable[..., object]) -> Any:
        def call(_: int, *arguments: int) -> int:
            try:
                with self._device.guard():  # csrc/steps.cpp makes the device's context current
                    verb(*arguments)
            except BaseException as error:  # it cannot pass through C++
                self.errors.append(error)
                return -1
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_int64] * count)(call)

    def _launch(self, kernel: int, stream: int, arguments: int, num_blocks: int) -> None:
        name = self._device.kernels[kernel]
        types = [Batch, *([Rotation] if "rotated" in name else [Homes] if name.startswith("keep") else [])]
        pointers = (ctypes.c_void_p * len(types)).from_address(arguments)
        structures = [kind.from_address(pointer) for kind, pointer in zip(types, pointers, strict=True)]
        self._device.launch(name, stream, Arguments(*structures), num_blocks)
