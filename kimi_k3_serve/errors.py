# SPDX-License-Identifier: Apache-2.0


class UserError(Exception):
    """Something the user can mend. Its text is one line: the cause, then the remedy."""
