-- Rows of tables without status columns that could not be published at once, kept whole. Sent
-- rows leave; failed and abandoned ones stay for an operator.
CREATE TABLE IF NOT EXISTS outboxd_parked (
  name VARCHAR(64) NOT NULL,
  table_name VARCHAR(255) NOT NULL COMMENT 'schema.table',
  id_hash BINARY(32) NOT NULL COMMENT 'SHA-256 of row_id, which may be too long for a key',
  seq BIGINT UNSIGNED NOT NULL AUTO_INCREMENT COMMENT 'order of parking, which is the order of delivery',
  id_kind TINYINT NOT NULL COMMENT '0 signed, 1 unsigned, 2 text, 3 binary',
  row_id TEXT NOT NULL COMMENT 'as printed',
  aggregate_type TEXT NOT NULL,
  aggregate_id TEXT NOT NULL,
  aggregate_hash BINARY(32) NOT NULL,
  envelope LONGTEXT NULL COMMENT 'JSON, the message without its body; NULL: none could be built',
  body LONGBLOB NULL,
  status TINYINT NOT NULL COMMENT '0 pending, 2 failed, 3 processing, 4 abandoned',
  retry_count INT UNSIGNED NOT NULL DEFAULT 0,
  next_retry_at DATETIME(6) NULL COMMENT 'UTC',
  locked_by VARCHAR(64) NULL,
  locked_until DATETIME(6) NULL COMMENT 'UTC',
  last_error VARCHAR(1024) NULL,
  created_at DATETIME(6) NOT NULL COMMENT 'UTC',
  updated_at DATETIME(6) NOT NULL COMMENT 'UTC',
  PRIMARY KEY (name, table_name, id_hash),
  UNIQUE KEY by_seq (seq),
  KEY due (name, table_name, status, next_retry_at, seq),
  KEY by_aggregate (name, table_name, aggregate_hash, seq)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin
