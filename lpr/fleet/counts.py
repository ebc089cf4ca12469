"""Counts of shared drafts, which the driver sends to the front for its metrics."""

import msgspec


class DraftCounts(msgspec.Struct, array_like=True):
    """Counts since the driver began. Each is written by one thread only."""

    sent: int = 0  # outputs that the store has accepted
    unsent: int = 0  # outputs dropped because the store was slow, unreachable or refused them
    learnt: int = 0  # outputs of other replicas that were learned
    own: int = 0  # entries of the stream that this replica wrote
    duplicate: int = 0
    malformed: int = 0  # entries in another format, or damaged
    passed_over: int = 0  # times that an answer was too long to read and its entries were skipped
    sent_tokens: int = 0
    learnt_tokens: int = 0
    outside_vocabulary: int = 0  # token ids dropped because the model has no such token
    write_errors: int = 0
    read_errors: int = 0
    snapshot_errors: int = 0
    snapshots_written: int = 0
    snapshots_loaded: int = 0
    write_up: bool = False  # True if the store accepted the last outputs sent
    read_up: bool = False  # True if the store answered the last read
    send_queue: int = 0  # outputs that wait to be sent
    learn_queue: int = 0  # outputs that wait to be learned
    lag: float = 0.0  # seconds between the newest learned output's arrival in the store and when it was learned
