"""`drawbar.keras`, under a path like those of Ray Train."""

from drawbar.keras import *
