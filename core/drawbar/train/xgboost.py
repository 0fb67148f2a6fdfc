"""`drawbar.xgboost`, under the path that it has in Ray Train."""

from drawbar.xgboost import *
