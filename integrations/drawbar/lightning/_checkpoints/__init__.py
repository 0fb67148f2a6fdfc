"""Lightning's checkpoints are Drawbar's: how they are committed, found again and gone on from."""
