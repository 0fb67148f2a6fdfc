"""`__main__` of the processes that `multiprocessing` spawns in a training function.

It has the functions and classes of the driver's script.
"""

import os
import pickle
from pathlib import Path

NAMES_FILE_VARIABLE = "DRAWBAR_SCRIPT_NAMES_FILE"
"""Environment variable with the path of the pickled names."""

if __name__ == "__mp_main__":
    globals().update(pickle.loads(Path(os.environ[NAMES_FILE_VARIABLE]).read_bytes()))
