-- The manifest of a data set, version 1. Times are seconds since 1970 and only labels.
PRAGMA application_id = 0x41455249; -- 'AERI'
PRAGMA user_version = 1;

-- The one row that says what this data set is.
CREATE TABLE dataset (
    one                INTEGER PRIMARY KEY CHECK (one = 1),
    format_version     INTEGER NOT NULL,
    fingerprint        TEXT NOT NULL CHECK (json_valid(fingerprint)),
    fingerprint_digest BLOB NOT NULL CHECK (length(fingerprint_digest) = 32),
    spec               TEXT NOT NULL CHECK (json_valid(spec)),
    created            INTEGER NOT NULL
) STRICT;

-- Sealed shards. The file's name follows from the id, so no path can come from the database.
CREATE TABLE shard (
    id     INTEGER PRIMARY KEY CHECK (id BETWEEN 0 AND 999999),
    file   TEXT NOT NULL UNIQUE CHECK (file = format('shard-%06d.safetensors', id)),
    bytes  INTEGER NOT NULL CHECK (bytes > 0),
    digest BLOB NOT NULL CHECK (length(digest) = 32),
    sealed INTEGER NOT NULL
) STRICT;

-- Every sample once, under the hash of its token ids and loss mask.
CREATE TABLE sample (
    id               BLOB PRIMARY KEY CHECK (length(id) = 16),
    shard            INTEGER NOT NULL REFERENCES shard (id),
    tokens           INTEGER NOT NULL CHECK (tokens > 0),
    trainable_tokens INTEGER NOT NULL CHECK (trainable_tokens BETWEEN 0 AND tokens),
    source_file      TEXT NOT NULL,
    source_line      INTEGER NOT NULL,
    truncated        INTEGER NOT NULL CHECK (truncated IN (0, 1))
) STRICT, WITHOUT ROWID;
CREATE INDEX sample_shard ON sample (shard);

CREATE TABLE tensor (
    sample BLOB NOT NULL REFERENCES sample (id),
    name   TEXT NOT NULL,
    dtype  TEXT NOT NULL,
    shape  TEXT NOT NULL CHECK (json_valid(shape)),
    rms    REAL,
    absmax REAL,
    PRIMARY KEY (sample, name)
) STRICT, WITHOUT ROWID;

-- Input files, with as many lines as must be accounted for.
CREATE TABLE input (
    file   TEXT PRIMARY KEY,
    lines  INTEGER NOT NULL CHECK (lines >= 0),
    bytes  INTEGER NOT NULL CHECK (bytes >= 0),
    digest BLOB NOT NULL CHECK (length(digest) = 32)
) STRICT, WITHOUT ROWID;

-- What became of each input line; a line without a row is pending.
CREATE TABLE source (
    file    TEXT NOT NULL,
    line    INTEGER NOT NULL CHECK (line >= 0),
    digest  BLOB NOT NULL CHECK (length(digest) = 16),
    outcome TEXT NOT NULL CHECK (outcome IN ('committed', 'duplicate', 'rejected')),
    sample  BLOB REFERENCES sample (id),
    reason  TEXT,
    PRIMARY KEY (file, line),
    CHECK ((outcome = 'rejected') = (sample IS NULL)),
    CHECK ((outcome = 'rejected') = (reason IS NOT NULL))
) STRICT, WITHOUT ROWID;
-- A sample is committed by one line; every other line with it is a duplicate.
CREATE UNIQUE INDEX source_committed ON source (sample) WHERE outcome = 'committed';

CREATE TABLE run (
    id      INTEGER PRIMARY KEY,
    started INTEGER NOT NULL,
    stopped INTEGER,
    host    TEXT NOT NULL,
    pid     INTEGER NOT NULL,
    version TEXT NOT NULL,
    argv    TEXT NOT NULL CHECK (json_valid(argv)),
    config  TEXT NOT NULL,
    outcome TEXT,
    tokens  INTEGER,
    bytes   INTEGER,
    seconds REAL
) STRICT;

CREATE VIEW v_samples AS
SELECT lower(hex(sample.id)) AS id, shard.file AS shard, sample.tokens, sample.trainable_tokens,
       sample.source_file, sample.source_line, sample.truncated
FROM sample JOIN shard ON shard.id = sample.shard
ORDER BY sample.id;

CREATE VIEW v_shards AS
SELECT shard.file, shard.bytes, count(sample.id) AS samples,
       coalesce(sum(sample.tokens), 0) AS tokens,
       coalesce(sum(sample.trainable_tokens), 0) AS trainable_tokens,
       lower(hex(shard.digest)) AS digest, datetime(shard.sealed, 'unixepoch') AS sealed
FROM shard LEFT JOIN sample ON sample.shard = shard.id
GROUP BY shard.id ORDER BY shard.id;

CREATE VIEW v_rejects AS
SELECT file, line, reason FROM source WHERE outcome = 'rejected' ORDER BY file, line;

-- Samples by length, in steps of 256 tokens.
CREATE VIEW v_token_histogram AS
SELECT tokens / 256 * 256 AS from_tokens, tokens / 256 * 256 + 255 AS to_tokens,
       count(*) AS samples, sum(tokens) AS tokens, sum(trainable_tokens) AS trainable_tokens
FROM sample GROUP BY tokens / 256 ORDER BY 1;
