"""`drawbar.lightgbm`, under the path that it has in Ray Train."""

from drawbar.lightgbm import *
