"""The workers from outside, on Ray or in threads: placed, started, ranked, told, ended."""
