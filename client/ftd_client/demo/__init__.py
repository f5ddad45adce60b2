"""`ftd demo`: one daemon, several workers, a real model; what it saves is measured on the spot.

__main__    command line and exit statuses
run         what happens in which order
prepare     model directory, environment of children
daemon, commands, interrupts    the daemon, commands of ftd, signals
crew, worker, models            worker processes: from outside, from inside, and what they need of transformers
measure, report                 memory from /proc, tables
"""
