-- Orders to the leader, inserted by anyone.
CREATE TABLE IF NOT EXISTS outboxd_signal (
  id BIGINT UNSIGNED NOT NULL AUTO_INCREMENT,
  name VARCHAR(64) NOT NULL,
  type VARCHAR(64) NOT NULL,
  data LONGTEXT NULL COMMENT 'JSON',
  created_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
  done_at DATETIME(6) NULL COMMENT 'UTC',
  result TEXT NULL,
  PRIMARY KEY (id),
  KEY undone (name, done_at, id)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin
