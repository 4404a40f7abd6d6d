-- Version 3: what storing states in fewer bits has cost.
PRAGMA user_version = 3;

-- Root mean square of (state - stored state) over that of the state, per sample and layer. A sample
-- stored in the target's own precision has no row, nor has one whose manifest was rebuilt.
CREATE TABLE storage_error (
    sample BLOB NOT NULL REFERENCES sample (id) ON DELETE CASCADE,
    layer  INTEGER NOT NULL CHECK (layer >= 0),
    error  REAL NOT NULL CHECK (error >= 0),
    PRIMARY KEY (sample, layer)
) STRICT, WITHOUT ROWID;
