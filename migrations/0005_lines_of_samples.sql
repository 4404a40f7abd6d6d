-- Version 5: earlier versions knew no blank lines; as many as the outcomes show are known now, and the
-- next run counts. An index for what asks a sample for its lines.
PRAGMA user_version = 5;

UPDATE input SET blank = max(blank, (SELECT coalesce(max(line), 0) FROM source
    WHERE source.file = input.file) - lines);

CREATE INDEX source_sample ON source (sample);
