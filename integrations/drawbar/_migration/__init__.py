"""Import paths and names of Ray Train, for scripts that replace `ray.train` with Drawbar."""
