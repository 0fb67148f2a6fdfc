"""`drawbar.torch`, under the path that it has in Ray Train."""

from drawbar.torch import *
