"""`drawbar.lightning`, under the path that it has in Ray Train."""

from drawbar.lightning import *
