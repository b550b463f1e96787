-- What an operator has paused.
CREATE TABLE IF NOT EXISTS outboxd_pause (
  name VARCHAR(64) NOT NULL,
  table_name VARCHAR(255) NOT NULL COMMENT 'schema.table; empty: all',
  paused_at DATETIME(6) NOT NULL COMMENT 'UTC',
  PRIMARY KEY (name, table_name)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin
