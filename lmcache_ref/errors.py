"""Every error a user of this package can meet, one class per rule of the contract.

An exception here means the *input* was wrong and nothing was written; `assert` is kept for our own bugs.
Each class names the rule of the contract (see `transfer.py`) that it defends. Messages name the argument,
what it was and what is allowed.
"""

from __future__ import annotations


class LMCacheRefError(Exception):
    """Base of everything raised on purpose by this package."""


class ArgumentError(LMCacheRefError, ValueError):
    """An argument is missing, of the wrong type, or contradicts another one (rule 9)."""


class LayoutError(LMCacheRefError, ValueError):
    """The engine's tensors have no reading, or several, or one that contradicts known sizes (rule 9)."""


class StrideError(LayoutError):
    """Strides that no backend may address: HS not contiguous, stride 0, overlapping memory (rule 8)."""


class DtypeError(LMCacheRefError, ValueError):
    """Chunk and cache dtypes that are not the same bytes (rule 1)."""


class SlotError(LMCacheRefError, ValueError):
    """Base of everything wrong with a slot mapping."""


class SlotRangeError(SlotError):
    """slot >= NB*BS (rule 3)."""


class DuplicateSlotError(SlotError):
    """One scatter would write the same slot twice (rule 4)."""


class SkipPrefixError(LMCacheRefError, ValueError):
    """`skip_prefix_n_tokens` is not a count of tokens (rule 6)."""


class ChunkError(LMCacheRefError, ValueError):
    """A chunk's shape, format or token range does not fit the cache or the slot mapping (rules 7 and 9)."""


class ContractViolation(LMCacheRefError, AssertionError):
    """A backend broke the contract: it wrote where it must not, or the wrong bytes (rules 1, 2, 5). Raised by checkers."""


class BackendError(LMCacheRefError, RuntimeError):
    """The backend asked for is unknown, incomplete or cannot run here. Never answered by falling back."""


class ObjectError(LMCacheRefError, RuntimeError):
    """A memory object is used against its life cycle."""


class UseAfterFreeError(ObjectError):
    """The memory of a freed object was asked for."""


class DoubleFreeError(ObjectError):
    """An object was freed, or its reference count lowered, more often than it was taken."""
