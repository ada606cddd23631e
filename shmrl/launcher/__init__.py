"""`shmrl run`: check, start, watch and tear down every process of a run. Imports no torch; keep this file empty,
because the janitor imports the package and has to stay small."""
