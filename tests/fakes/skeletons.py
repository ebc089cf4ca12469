"""Class skeletons: prompts for a small code model, which has to write the last method and then to end."""

SKELETONS = (
    '''\
import math


class Circle:
    """A circle with a radius and a centre."""

    def __init__(self, radius, x=0.0, y=0.0):
        self.radius = radius
        self.x = x
        self.y = y

    def area(self):
        """Return the area of the circle."""
        return math.pi * self.radius**2

    def contains(self, x, y):
        """Return True if the point lies in the circle."""
''',
    '''\
import json
import os


class Settings:
    """Settings that are kept in a JSON file."""

    def __init__(self, path):
        self.path = path
        self.values = {}

    def load(self):
        """Read the values from the file, if it exists."""
        if os.path.exists(self.path):
            with open(self.path) as file:
                self.values = json.load(file)

    def save(self):
        """Write the values to the file."""
''',
    '''\
class Inventory:
    """
    This class counts the items in a shop.
    """

    def __init__(self):
        """
        Initialise the inventory with no items.
        """
        self.items = {}

    def add_item(self, name, count):
        """
        Add a number of items.
        :param name: str, the name of the item
        :param count: int, how many are added
        :return: int, how many there are now
        """


    def remove_item(self, name):
        """
        Remove an item from the inventory.
        :param name: str, the name of the item
        :return: bool, True if there was such an item
        """
''',
    '''\
from collections import deque


class RingBuffer:
    """The last values of a stream."""

    def __init__(self, size):
        if size < 1:
            raise ValueError("size must be positive")
        self.values = deque(maxlen=size)

    def push(self, value):
        """Add a value; the oldest one is dropped."""
        self.values.append(value)

    def mean(self):
        """Return the mean of the values, or None if there are none."""
''',
    '''\
import re


class Tokenizer:
    """Split text into words and count them."""

    pattern = re.compile(r"[A-Za-z']+")

    def __init__(self, text):
        self.text = text
        self.words = self.pattern.findall(text.lower())

    def count(self, word):
        """Return how often the word occurs."""
        return self.words.count(word)

    def most_common(self, number=10):
        """Return the most common words."""
''',
    '''\
import logging
import socket

logger = logging.getLogger(__name__)


class Client:
    """A client that sends lines to a server."""

    def __init__(self, host, port, timeout=5.0):
        self.host = host
        self.port = port
        self.timeout = timeout
        self.socket = None

    def connect(self):
        """Open the connection."""
        self.socket = socket.create_connection((self.host, self.port), self.timeout)
        logger.debug("connected to %s", self.host)

    def close(self):
        """Close the connection if it is open."""
''',
    '''\
from datetime import datetime


class Task:
    """A task with a title and a date on which it is due."""

    def __init__(self, title, due):
        self.title = title
        self.due = due
        self.done = False

    def finish(self):
        """Mark the task as done."""
        self.done = True

    def is_late(self):
        """Return True if the task is not done and its date is over."""
''',
    '''\
class Matrix:
    """
    This class holds a matrix as a list of rows.
    """

    def __init__(self, rows):
        self.rows = rows

    def shape(self):
        """
        Return the number of rows and columns.
        >>> Matrix([[1, 2], [3, 4]]).shape()
        (2, 2)
        """
        return len(self.rows), len(self.rows[0])

    def transpose(self):
        """
        Return the matrix with rows and columns exchanged.
        >>> Matrix([[1, 2], [3, 4]]).transpose().rows
        [[1, 3], [2, 4]]
        """
''',
)
