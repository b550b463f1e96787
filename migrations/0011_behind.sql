-- What lies unpublished behind the checkpoint without a trace in its table, so that it holds its aggregates after a
-- restart too. Written only when it changes.
CREATE TABLE IF NOT EXISTS outboxd_behind (
  name VARCHAR(64) NOT NULL,
  behind LONGTEXT NOT NULL COMMENT 'JSON',
  PRIMARY KEY (name)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin
