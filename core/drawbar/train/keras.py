"""`drawbar.keras`, under a path like Ray Train's."""

from drawbar.keras import *
