//! Prints `docs/openapi.json`: the description of the API of a server without keys.

use std::io::Write;

fn main() -> std::io::Result<()> {
    let document = qwill_server::openapi_document(true);
    writeln!(std::io::stdout(), "{document:#}")
}
