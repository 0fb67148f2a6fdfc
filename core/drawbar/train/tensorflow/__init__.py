"""`drawbar.tensorflow`, under the path that it has in Ray Train."""

from drawbar.tensorflow import *
