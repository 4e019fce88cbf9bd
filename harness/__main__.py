# SPDX-License-Identifier: Apache-2.0
import sys

if __name__ == "__main__":
    try:
        from harness.cli import main

        sys.exit(main())
    except KeyboardInterrupt:  # while the libraries are still being imported
        sys.exit("error: interrupted; nothing was measured yet")
