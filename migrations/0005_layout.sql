-- Layouts of the outbox tables as they were at the position.
CREATE TABLE IF NOT EXISTS outboxd_layout (
  name VARCHAR(64) NOT NULL,
  table_name VARCHAR(255) NOT NULL COMMENT 'schema.table',
  layout LONGTEXT NOT NULL COMMENT 'JSON',
  PRIMARY KEY (name, table_name)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin
