//! `qwill chat`: a conversation in the terminal.
//!
//! It always speaks HTTP: to the server of `--url`, or to one that it starts in this process on a private
//! loopback port. So there is one way of asking, and its answers are those that any client gets.

mod local;
mod render;
mod session;

use std::io::{BufRead, IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};

use crate::args::ChatArgs;
use crate::client::Client;
use crate::terminal;
use local::LocalServer;
use session::{Input, Session};

const HELP: &str = "\
/reset           forget the conversation
/system TEXT     set the system prompt and begin anew; without TEXT, remove it
/thinking on|off ask the model to think first, or not to
/quit            leave (also Ctrl-D)
A line that ends in \\ goes on in the next one. Ctrl-C stops the answer.";

/// Talks until the input ends.
pub(crate) fn run(arguments: &ChatArgs) -> Result<()> {
    let (client, _server) = connect(arguments)?;
    let model = client.model()?;
    let interrupts = Arc::new(Interrupts::default());
    let _signals = interrupts.catch()?;
    let mut session = Session::new(model.clone(), arguments);
    let interactive = std::io::stdin().is_terminal() && terminal::is_interactive();
    if interactive {
        println!("{}", terminal::dim(&format!("Talking to {model}. /help lists the commands.")));
    }
    let mut lines = std::io::stdin().lock().lines();
    loop {
        if interactive {
            print!("\n{} ", terminal::bold(">"));
            std::io::stdout().flush()?;
        }
        let Some(text) = read_message(&mut lines)? else { break };
        match Input::parse(&text) {
            Input::Nothing => {}
            Input::Quit => break,
            Input::Help => println!("{}", terminal::dim(HELP)),
            Input::Unknown(command) => eprintln!("unknown command {command}; /help lists them"),
            Input::Change(change) => println!("{}", terminal::dim(session.apply(change))),
            Input::Say(text) => answer(&client, &mut session, text, &interrupts, interactive)?,
        }
    }
    if interactive {
        println!();
    }
    Ok(())
}

fn connect(arguments: &ChatArgs) -> Result<(Client, Option<LocalServer>)> {
    if let Some(url) = &arguments.url {
        return Ok((Client::new(url, arguments.api_key.clone())?, None));
    }
    let server = LocalServer::start(arguments)?;
    Ok((Client::new(&server.url, Some(server.key.clone()))?, Some(server)))
}

/// One turn. A failed one is reported and leaves the conversation as it was; only a broken output ends the
/// program.
fn answer(
    client: &Client,
    session: &mut Session,
    text: String,
    interrupts: &Interrupts,
    interactive: bool,
) -> Result<()> {
    let body = session.request(&text);
    interrupts.pressed.store(false, Ordering::Release);
    interrupts.answering.store(true, Ordering::Release);
    let answered = render::stream(client, body, &interrupts.pressed, interactive);
    interrupts.answering.store(false, Ordering::Release);
    match answered? {
        Ok(answer) => session.remember(text, answer),
        Err(error) => eprint!("{}", crate::failure::render(&error)),
    }
    Ok(())
}

/// The next message; `None` at the end of the input.
fn read_message(lines: &mut impl Iterator<Item = std::io::Result<String>>) -> Result<Option<String>> {
    let mut message = String::new();
    for line in lines {
        let line = line.context("reading standard input")?;
        match line.strip_suffix('\\') {
            Some(begun) => {
                message.push_str(begun);
                message.push('\n');
            }
            None => return Ok(Some(message + &line)),
        }
    }
    Ok((!message.is_empty()).then_some(message))
}

/// What Ctrl-C does: it ends an answer, and at the prompt it says how to leave.
#[derive(Debug, Default)]
struct Interrupts {
    /// Whether an answer is running.
    answering: AtomicBool,
    /// Whether it is to be stopped.
    pressed: AtomicBool,
}

impl Interrupts {
    /// Begins to catch the signal. The runtime must live as long as the program listens.
    fn catch(self: &Arc<Self>) -> Result<tokio::runtime::Runtime> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let mut signals = {
            let _context = runtime.enter();
            tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt())?
        };
        let interrupts = Arc::clone(self);
        runtime.spawn(async move {
            while signals.recv().await.is_some() {
                if interrupts.answering.load(Ordering::Acquire) {
                    interrupts.pressed.store(true, Ordering::Release);
                } else {
                    eprintln!("\n{}", terminal::dim("/quit or Ctrl-D leaves"));
                }
            }
        });
        Ok(runtime)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(text: &str) -> Vec<String> {
        let mut lines = text.as_bytes().lines();
        std::iter::from_fn(|| read_message(&mut lines).unwrap()).collect()
    }

    #[test]
    fn a_backslash_joins_lines() {
        assert_eq!(messages("one\ntwo \\\nthree\n"), ["one", "two \nthree"]);
        assert_eq!(messages(""), Vec::<String>::new());
        assert_eq!(messages("cut \\\n"), ["cut \n"]);
        assert_eq!(messages("\n"), [""]);
    }
}
