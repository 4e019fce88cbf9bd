# SPDX-License-Identifier: Apache-2.0
"""Launch one Triton kernel again and again at little host cost.

`kernel[grid](...)` finds out at every launch which compiled kernel fits its arguments: tens of microseconds, as long as
a chunk takes on the device. A kernel whose arguments are all integers that it does not specialise on is compiled once
for its constants; from then on `Launch` hands the arguments straight to that.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def integer_kernel(function: Callable[..., Any]) -> Any:
    """`triton.jit` for a kernel that takes integers, of the types it states, and then its constants.

    None of the integers is specialised on: not on its value, not on its alignment.
    """
    import triton  # here: the host's side is imported where there is no Triton, too
    import triton.language as tl

    parameters = inspect.signature(function).parameters.values()
    integers = [one.name for one in parameters if one.annotation is not tl.constexpr]
    return triton.jit(function, do_not_specialize=integers)


class Launch:
    """A kernel with its constants, for one device.

    Args:
        kernel: an `integer_kernel`.
        constants: all of them, by name.
        options: the compiler's, such as num_warps.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, Any], **options: Any) -> None:
        self.kernel, self.constants, self.options = kernel, constants, options
        names = [name for name in kernel.arg_names if name in constants]
        assert names == kernel.arg_names[-len(constants) :], "constants are a kernel's last parameters"
        self.values = tuple(constants[name] for name in names)
        self.compiled: Any = None

    def __call__(self, programs: int, *arguments: int) -> None:
        """Enqueue `programs` programs on the current stream."""
        if self.compiled is None:
            # The interpreter has nothing to give back, and comes here every time.
            self.compiled = self.kernel[(programs,)](*arguments, **self.constants, **self.options)
        else:
            self.compiled[(programs, 1, 1)](*arguments, *self.values)
