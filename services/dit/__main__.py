"""`python -m services.dit --model DIR --listen ADDRESS`: the DiT worker as a process of its own, without Ray."""

from services.common.process import main
from services.dit.config import DitConfig

if __name__ == "__main__":
    main("services.dit", DitConfig)
