"""What tests with processes ask of the machine that runs them, which may be a loaded one: how long
they wait, and a port of their own."""
import random
import socket

PATIENCE = 300  # s, for what must happen: only a hang takes so long


def free_port():
    """Not one of those that the kernel gives out by itself: it might go to a connection of another
    test before the program that it is meant for listens."""
    while True:
        port = random.randrange(10000, 32000)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
                return port
            except OSError:
                pass
