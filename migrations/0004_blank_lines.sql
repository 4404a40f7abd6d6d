-- Version 4: blank lines of an input. They need no outcome, but are counted in line numbers.
PRAGMA user_version = 4;

ALTER TABLE input ADD COLUMN blank INTEGER NOT NULL DEFAULT 0 CHECK (blank >= 0);
