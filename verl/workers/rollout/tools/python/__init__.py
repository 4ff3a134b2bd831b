"""The Python tool. The trainer uses tool.py, and session.py with `session: true`. The programs' interpreter need not be
the trainer's (Python 3.9, standard library): in it, server.py forks a process for each program or session,
confinement.py confines it, and cell.py runs a program.
"""
