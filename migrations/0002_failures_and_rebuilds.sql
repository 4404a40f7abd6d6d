-- Version 2: shards whose rows were taken from the file again, and samples at which the target died.
PRAGMA user_version = 2;

-- 1 where the manifest had been lost and the digest was taken from the file as it was found.
ALTER TABLE shard ADD COLUMN rebuilt INTEGER NOT NULL DEFAULT 0 CHECK (rebuilt IN (0, 1));

-- How often a rank died while a sample was in its batch. After three times the sample is a reject.
CREATE TABLE failure (
    sample BLOB PRIMARY KEY CHECK (length(sample) = 16),
    count  INTEGER NOT NULL CHECK (count > 0),
    batch  BLOB NOT NULL CHECK (length(batch) = 16),
    error  TEXT NOT NULL
) STRICT, WITHOUT ROWID;
