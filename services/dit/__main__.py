"""`python -m services.dit --model DIR --listen ADDRESS`: the DiT worker as a process of its own, without Ray."""

import os

from services.common.process import main
from services.common.token import TOKEN_VARIABLE
from services.dit.config import DitConfig

if __name__ == "__main__":
    # Taken out: no process that this one starts needs it.
    main("services.dit", DitConfig, os.environ.pop(TOKEN_VARIABLE, ""))
