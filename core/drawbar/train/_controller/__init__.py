"""The loop: await, decide, act; what each message of an attempt means."""
