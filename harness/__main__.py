# SPDX-License-Identifier: Apache-2.0
import os
import sys

# Where a daemon closed them, the next files to be opened would take their places: libuv aborts then.
for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
    if getattr(sys, name) is None:
        os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
        setattr(sys, name, os.fdopen(descriptor, "r" if descriptor == 0 else "w"))

if __name__ == "__main__":
    try:
        from harness.cli import main

        sys.exit(main())
    except KeyboardInterrupt:  # while the libraries are still being imported
        sys.exit("error: interrupted; nothing was measured yet")
