# SPDX-License-Identifier: Apache-2.0
"""The one exception that the command line shows to a user."""


class UserError(Exception):
    """Something the user can put right, told in one line: what is wrong, then what to do about it.

    The command line prints `error: <line>` and exits with 2; whatever was measured before stays on disk.
    """
