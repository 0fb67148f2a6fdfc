"""A script of `launch` that imports torch: `_import_script.py DIRECTORY`."""

import os
import sys
import time

import torch

if __name__ == "__main__":
    with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
        print(time.time(), torch.__version__, file=file)
