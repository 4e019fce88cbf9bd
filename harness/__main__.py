# SPDX-License-Identifier: Apache-2.0
import sys

from harness.cli import main

sys.exit(main())
