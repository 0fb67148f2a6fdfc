"""`drawbar doctor`: whether machines are fit for a run, before one is started."""
