//! What a statement in the binlog means for us. Lenient: it is no parser, and where it cannot
//! tell it says that a table *may* be concerned.

use super::event::Xid;

/// What a statement is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Sql<'a> {
    /// BEGIN, START TRANSACTION.
    Begin,
    /// COMMIT.
    Commit,
    /// ROLLBACK of everything.
    Rollback,
    /// SAVEPOINT name.
    Savepoint(Vec<u8>),
    /// ROLLBACK TO name (the server leaves the word SAVEPOINT out).
    RollbackTo(Vec<u8>),
    /// XA START: begins a group.
    XaStart,
    /// XA END, XA PREPARE: part of a group.
    XaPart,
    /// XA COMMIT, a group of its own.
    XaCommit(Option<Xid>),
    /// XA ROLLBACK, a group of its own.
    XaRollback(Option<Xid>),
    /// A statement that may change tables' definitions, with its tokens.
    Ddl(Vec<Token<'a>>),
    /// A statement that may insert rows.
    Insert(Vec<Token<'a>>),
    /// Anything else.
    Other,
}

/// A word, an identifier or a sign.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Token<'a> {
    /// A bare word or number.
    Word(&'a [u8]),
    /// A quoted identifier, quotes removed (also `"…"`, which may be a string).
    Quoted(Vec<u8>),
    /// A string literal with its content.
    Text(Vec<u8>),
    /// A hexadecimal literal `X'…'`.
    Hex(&'a [u8]),
    /// One other byte.
    Sign(u8),
}

impl Token<'_> {
    fn is_word(&self, word: &str) -> bool {
        matches!(self, Self::Word(w) if w.eq_ignore_ascii_case(word.as_bytes()))
    }

    fn name(&self) -> Option<&[u8]> {
        match self {
            Self::Word(w) => Some(w),
            Self::Quoted(q) => Some(q),
            _ => None,
        }
    }
}

/// Tokens of a statement; comments are dropped, but what stands in executable ones is kept.
struct Lexer<'a>(&'a [u8]);

impl<'a> Iterator for Lexer<'a> {
    type Item = Token<'a>;

    fn next(&mut self) -> Option<Token<'a>> {
        loop {
            let first = *self.0.first()?;
            match first {
                b if b.is_ascii_whitespace() => self.skip(1),
                b'#' => self.skip_line(),
                b'-' if self.0.starts_with(b"-- ") || self.0 == b"--" => self.skip_line(),
                b'/' if self.0.starts_with(b"/*!") || self.0.starts_with(b"/*M!") => {
                    let mark = self.0.iter().position(|b| *b == b'!').unwrap_or(2) + 1;
                    let digits = self.0[mark..]
                        .iter()
                        .take_while(|b| b.is_ascii_digit())
                        .count();
                    self.skip(mark + digits);
                }
                b'*' if self.0.starts_with(b"*/") => self.skip(2),
                b'/' if self.0.starts_with(b"/*") => {
                    let end = self.0.windows(2).skip(2).position(|w| w == b"*/");
                    self.skip(end.map_or(self.0.len(), |e| e + 4));
                }
                b'x' | b'X' if self.0.get(1) == Some(&b'\'') => {
                    let end = self.0[2..].iter().position(|b| *b == b'\'').unwrap_or(0);
                    let hex = &self.0[2..2 + end];
                    self.skip(end + 3);
                    return Some(Token::Hex(hex));
                }
                b'`' => return Some(Token::Quoted(self.quoted(b'`', false))),
                b'"' => return Some(Token::Quoted(self.quoted(b'"', true))),
                b'\'' => return Some(Token::Text(self.quoted(b'\'', true))),
                b if is_word(b) => {
                    let n = self.0.iter().take_while(|b| is_word(**b)).count();
                    let word = &self.0[..n];
                    self.skip(n);
                    return Some(Token::Word(word));
                }
                b => {
                    self.skip(1);
                    return Some(Token::Sign(b));
                }
            }
        }
    }
}

fn is_word(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b == b'_' || b == b'$' || b >= 0x80
}

impl Lexer<'_> {
    fn skip(&mut self, n: usize) {
        self.0 = self.0.get(n..).unwrap_or_default();
    }

    fn skip_line(&mut self) {
        let end = self.0.iter().position(|b| *b == b'\n');
        self.skip(end.map_or(self.0.len(), |e| e + 1));
    }

    fn quoted(&mut self, quote: u8, escapes: bool) -> Vec<u8> {
        let mut text = Vec::new();
        let mut i = 1;
        while let Some(&b) = self.0.get(i) {
            let next = self.0.get(i + 1).copied();
            match next {
                Some(n) if b == quote && n == quote => {
                    text.push(quote);
                    i += 2;
                }
                Some(n) if b == b'\\' && escapes => {
                    text.push(n);
                    i += 2;
                }
                _ if b == quote => break,
                _ => {
                    text.push(b);
                    i += 1;
                }
            }
        }
        self.skip(i + 1);
        text
    }
}

/// Sorts a statement.
pub(crate) fn classify(sql: &[u8]) -> Sql<'_> {
    let mut lexer = Lexer(sql);
    let Some(Token::Word(first)) = lexer.next() else {
        return Sql::Other;
    };
    let first = first.to_ascii_uppercase();
    let second = Lexer(lexer.0).next();
    let next_is = |w: &str| second.as_ref().is_some_and(|t| t.is_word(w));
    match &first[..] {
        b"BEGIN" => Sql::Begin,
        b"START" if next_is("TRANSACTION") => Sql::Begin,
        b"COMMIT" => Sql::Commit,
        b"SAVEPOINT" => Sql::Savepoint(last_name(lexer)),
        b"ROLLBACK" if next_is("TO") => Sql::RollbackTo(last_name(lexer)),
        b"ROLLBACK" => Sql::Rollback,
        b"XA" => xa(lexer),
        b"CREATE" | b"ALTER" | b"DROP" | b"RENAME" | b"TRUNCATE" => Sql::Ddl(lexer.collect()),
        b"INSERT" | b"REPLACE" | b"LOAD" | b"WITH" | b"CALL" | b"DO" | b"SELECT" => {
            Sql::Insert(lexer.collect())
        }
        _ => Sql::Other,
    }
}

fn last_name(lexer: Lexer<'_>) -> Vec<u8> {
    let mut name = Vec::new();
    for token in lexer {
        if let Some(n) = token.name() {
            name = n.to_ascii_lowercase();
        }
    }
    name
}

fn xa(mut lexer: Lexer<'_>) -> Sql<'_> {
    let Some(Token::Word(verb)) = lexer.next() else {
        return Sql::Other;
    };
    match &verb.to_ascii_uppercase()[..] {
        b"START" | b"BEGIN" => Sql::XaStart,
        b"END" | b"PREPARE" => Sql::XaPart,
        b"COMMIT" => Sql::XaCommit(xid(lexer)),
        b"ROLLBACK" => Sql::XaRollback(xid(lexer)),
        _ => Sql::Other,
    }
}

/// `X'hex',X'hex',format`, the form that servers write; strings are taken too.
fn xid(lexer: Lexer<'_>) -> Option<Xid> {
    let mut parts = Vec::new();
    let mut format = 1;
    for token in lexer {
        match token {
            Token::Hex(h) => parts.push(unhex(h)?),
            Token::Text(t) => parts.push(t),
            Token::Word(w) => format = std::str::from_utf8(w).ok()?.parse().ok()?,
            Token::Sign(b',') => {}
            _ => return None,
        }
    }
    let mut parts = parts.into_iter();
    Some(Xid {
        format,
        gtrid: parts.next()?,
        bqual: parts.next().unwrap_or_default(),
    })
}

fn unhex(hex: &[u8]) -> Option<Vec<u8>> {
    let digit = |b: u8| {
        char::from(b)
            .to_digit(16)
            .and_then(|d| u8::try_from(d).ok())
    };
    hex.chunks(2)
        .map(|pair| match pair {
            [a, b] => Some(digit(*a)? << 4 | digit(*b)?),
            _ => None,
        })
        .collect()
}

/// How names are compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NameRule {
    /// `lower_case_table_names` is not 0.
    pub(crate) fold: bool,
}

impl NameRule {
    pub(crate) fn eq(self, a: &[u8], b: &[u8]) -> bool {
        // Beyond ASCII the server folds by its own rules; folding too much only ever makes a
        // statement look as if it might concern a table.
        if self.fold {
            a.eq_ignore_ascii_case(b)
        } else {
            a == b
        }
    }
}

/// Whether the statement may concern `schema.table`.
pub(crate) fn mentions(
    tokens: &[Token<'_>],
    db: &[u8],
    schema: &str,
    table: &str,
    rule: NameRule,
) -> bool {
    let drops_database = tokens
        .first()
        .is_some_and(|t| t.is_word("DATABASE") || t.is_word("SCHEMA"));
    tokens.iter().enumerate().any(|(i, token)| {
        let Some(name) = token.name() else {
            return false;
        };
        if drops_database && rule.eq(name, schema.as_bytes()) {
            return true;
        }
        if !rule.eq(name, table.as_bytes()) {
            return false;
        }
        match i.checked_sub(2).map(|j| (&tokens[j], &tokens[j + 1])) {
            Some((qualifier, Token::Sign(b'.'))) => qualifier
                .name()
                .is_none_or(|q| rule.eq(q, schema.as_bytes())),
            _ => rule.eq(db, schema.as_bytes()),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn concerns(sql: &str, db: &str) -> bool {
        match classify(sql.as_bytes()) {
            Sql::Ddl(t) | Sql::Insert(t) => {
                mentions(&t, db.as_bytes(), "app", "outbox", NameRule::default())
            }
            _ => false,
        }
    }

    #[test]
    fn definitions_that_may_touch_the_table_are_noticed() {
        for sql in [
            "ALTER TABLE outbox ADD c INT",
            "alter table `outbox` add c int",
            "/* hi */ ALTER /*!50000 ONLINE */ TABLE app.outbox DROP c",
            "ALTER TABLE `app` . `outbox` DROP c",
            "CREATE TABLE IF NOT EXISTS outbox (id INT)",
            "DROP TABLE a, `b`, outbox",
            "RENAME TABLE outbox TO _outbox_del, _outbox_gho TO outbox",
            "TRUNCATE outbox",
            "CREATE UNIQUE INDEX i ON outbox (a)",
            "DROP DATABASE app",
            "/*!40000 DROP TABLE outbox */",
            "ALTER TABLE \"outbox\" ADD c INT",
            "-- note\nDROP TABLE outbox",
        ] {
            assert!(concerns(sql, "app"), "{sql}");
        }
        assert!(concerns("ALTER TABLE app.outbox ADD c INT", "other"));
    }

    #[test]
    fn other_tables_and_strings_do_not_concern_it() {
        for sql in [
            "ALTER TABLE _outbox_gho ADD c INT",
            "ALTER TABLE other.outbox ADD c INT",
            "CREATE TABLE t (c INT COMMENT 'outbox')",
            "CREATE TABLE t (c INT) /* outbox */",
            "DROP DATABASE other",
            "UPDATE outbox SET a = 1",
        ] {
            assert!(!concerns(sql, "app"), "{sql}");
        }
        assert!(!concerns("ALTER TABLE outbox ADD c INT", "other"));
    }

    #[test]
    fn parts_of_transactions_are_told_apart() {
        assert_eq!(classify(b"BEGIN"), Sql::Begin);
        assert_eq!(classify(b"COMMIT /* x */"), Sql::Commit);
        assert_eq!(classify(b"ROLLBACK"), Sql::Rollback);
        assert_eq!(classify(b"SAVEPOINT `S1`"), Sql::Savepoint(b"s1".to_vec()));
        assert_eq!(
            classify(b"ROLLBACK TO `s1`"),
            Sql::RollbackTo(b"s1".to_vec())
        );
        assert_eq!(
            classify(b"ROLLBACK TO SAVEPOINT s1"),
            Sql::RollbackTo(b"s1".to_vec())
        );
        assert_eq!(classify(b"XA START X'61',X'',1"), Sql::XaStart);
        assert_eq!(classify(b"XA END X'61',X'',1"), Sql::XaPart);
        let xid = Xid {
            format: 1,
            gtrid: b"a".to_vec(),
            bqual: Vec::new(),
        };
        assert_eq!(
            classify(b"XA COMMIT X'61',X'',1"),
            Sql::XaCommit(Some(xid.clone()))
        );
        assert_eq!(classify(b"XA ROLLBACK 'a'"), Sql::XaRollback(Some(xid)));
    }

    #[test]
    fn broken_statements_do_no_harm() {
        for sql in [
            &b"'"[..],
            b"`",
            b"/*",
            b"/*!",
            b"X'",
            b"--",
            b"\"\\",
            b"",
            b"CREATE X'",
        ] {
            let _ = classify(sql);
        }
        assert!(concerns("DROP TABLE `outbox", "app"));
    }
}
