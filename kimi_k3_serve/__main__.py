# SPDX-License-Identifier: Apache-2.0
import sys

from kimi_k3_serve.cli import main

sys.exit(main())
