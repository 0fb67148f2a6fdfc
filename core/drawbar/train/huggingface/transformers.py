"""`drawbar.transformers`, under the path that it has in Ray Train."""

from drawbar.transformers import *
